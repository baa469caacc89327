"""What happened in each step of a run: journal and trace, and the comparison of the steps."""
