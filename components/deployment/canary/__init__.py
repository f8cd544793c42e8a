"""A version that takes a growing share of the traffic: started, judged, grown, taken back."""
