"""Commands that show something: backends, explain, table, plugins, doctor."""
