"""Analysis of JSON schemas: faulty keywords, names of properties, and closing of objects."""
