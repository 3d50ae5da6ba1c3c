"""`baton bench`: a load generator, and what it measures of Baton or of any OpenAI endpoint."""
