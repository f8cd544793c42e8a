"""KPIs of matured rows and estimates for open rows, per model version.

The modules compute only. They use no file, clock or network.
"""
