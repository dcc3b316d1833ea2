"""Status over HTTP: the page, its JSON, the metrics."""
