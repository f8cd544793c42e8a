"""The TorchRec engine: tables shared out among several processes, on one machine or many."""
