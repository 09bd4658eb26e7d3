"""Learning curves: the trainer beside a plain transformers + PEFT loop, same data, same seeds. See ``__main__``."""
