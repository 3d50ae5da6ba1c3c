"""The decode worker: takes a ticket's offer, fetches the blocks, streams tokens."""
