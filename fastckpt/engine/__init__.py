"""The stages of a state's way, joined from the parts."""
