"""The OpenAI-compatible server and its web page; not written yet."""
