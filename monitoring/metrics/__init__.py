"""KPIs of matured rows and estimates for open rows, per model version.

The modules of this package only compute. No module uses a file, a clock or the network.
"""
