"""How the gateway talks to inference: vLLM servers, the adapters in them, the pool of them."""
