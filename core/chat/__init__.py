"""How families of models write reasoning and calls of tools: a parser for each, fed with the text as it comes."""
