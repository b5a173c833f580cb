"""Routes for operators: adapters, engine control, profiles, metrics and traces."""
