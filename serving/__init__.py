"""What people talk to: the command line; the OpenAI-compatible server and its web page are not written yet."""
