"""What the OpenAI API looks like from outside: routes, events, errors. Pure modules only."""
