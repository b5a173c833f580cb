"""How many of the mistakes that a kernel author may make the conformance kit finds."""
