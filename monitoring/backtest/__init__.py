"""Repeat the monitor's decisions on recorded data: backtests and incident replays."""
