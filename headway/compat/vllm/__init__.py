"""vLLM's offline names: options, keywords, classes and modules under which its programs find what Headway has."""
