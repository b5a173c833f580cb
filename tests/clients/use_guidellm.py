# pip: guidellm
"""guidellm's benchmark of synthetic requests at one rate."""
