"""Flax models and everything that turns a checkpoint into (config, params, tokenizer)."""
