"""A client's side: connections, heads, bodies, and the two shells that relayed requests come in through."""
