"""A client's side: connections, heads, and the two shells that relayed requests come in through."""
