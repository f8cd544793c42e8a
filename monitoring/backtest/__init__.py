"""Run the monitor's decisions over recorded records: backtests and incident replays."""
