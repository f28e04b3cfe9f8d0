"""`pagedjax bench-serve`: latencies and throughput of any server with OpenAI's API under requests that come at random.

`run.py` has the function; what is measured is defined in `metrics.py`.
"""
