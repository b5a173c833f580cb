"""What `auto` needs in production: the crossover table, its files, and how a point of it is measured."""
