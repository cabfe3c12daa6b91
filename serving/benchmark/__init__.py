"""The load benchmark's parts: one request, many requests, their summary, the bandwidth ceiling and the plot."""
