"""A layer of experts alone: Headway's ways and those of other libraries, beside the floors of memory and arithmetic."""
