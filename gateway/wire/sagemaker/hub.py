"""Hub contents are the base models of the catalogue, under their names in this dialect's alphabet."""

from datetime import UTC, datetime

import orjson

from gateway.core.catalog import BaseModel
from gateway.core.errors import NotFound
from gateway.wire.sagemaker.calls import Call
from gateway.wire.sagemaker.models import Document
from gateway.wire.sagemaker.names import HUB, HUB_VERSION, find_hub_content, hub_arn, hub_name
from gateway.wire.tokenizers import tokenizer_of

TRAINABLE = "@capability:training_session"
_SCHEMA = "1.0.0"
_SINCE = datetime.fromtimestamp(0, UTC)  # the catalogue does not say since when it has a model


async def list_page(call: Call) -> Document:
    """List the catalogue by name, if it is asked for as the public hub's models."""
    call.refuse("MaxSchemaVersion", "CreationTimeBefore", "CreationTimeAfter", "SortBy", "SortOrder")
    part, after = call.asked.get("NameContains", ""), call.asked.get("NextToken", "")
    names = {hub_name(model): model for model in call.catalog.models.values() if _is_hub(call)}
    rest = sorted(name for name in names if part in name and name > after)
    shown = rest[: call.page_size]
    return {
        "HubContentSummaries": [{**_content(names[name]), "HubContentSearchKeywords": [TRAINABLE]} for name in shown],
        "NextToken": shown[-1] if len(rest) > len(shown) else None,
    }


async def describe(call: Call) -> Document:
    """Describe a base model. Its document names the tokenizer that fits it.

    Raises:
        NotFound: no such hub, model or version.
    """
    if not _is_hub(call) or call.asked.get("HubContentVersion", HUB_VERSION) != HUB_VERSION:
        raise NotFound("no such hub content", code="unknown_base_model", field="HubName")
    model = find_hub_content(call.catalog, call.asked["HubContentName"], field="HubContentName")
    document = {
        "HuggingfaceId": tokenizer_of(model, call.request),
        "ContextLength": model.context_length,
        "MaxLoraRank": model.max_lora_rank,
    }
    return {
        **_content(model),
        "HubName": HUB,
        "HubArn": f"arn:aws:sagemaker:us-east-1:aws:hub/{HUB}",
        "HubContentDocument": orjson.dumps(document).decode(),
    }


def _is_hub(call: Call) -> bool:
    return call.asked["HubName"].rpartition("/")[2] == HUB and call.asked["HubContentType"] == "Model"


def _content(model: BaseModel) -> Document:
    return {
        "HubContentName": hub_name(model),
        "HubContentArn": hub_arn(model),
        "HubContentVersion": HUB_VERSION,
        "HubContentType": "Model",
        "DocumentSchemaVersion": _SCHEMA,
        "HubContentDisplayName": model.name,
        "HubContentStatus": "Available",
        "CreationTime": _SINCE,
    }
