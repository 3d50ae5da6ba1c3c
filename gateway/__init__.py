"""The front: takes requests from clients, owns them until they end, dispatches to both pools."""
