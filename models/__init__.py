"""Flax models and everything that turns a checkpoint into (config, params, tokenizer)."""

import os

# transformers advises to install torch whenever it is imported; what we take of it needs none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
