"""The way in: from a request as it arrived to the relay, and its accounts when it is over."""
