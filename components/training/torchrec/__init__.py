"""TorchRec engine: shards the tables over several processes, on one machine or many."""
