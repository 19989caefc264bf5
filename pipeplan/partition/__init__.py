"""Partitioners: each file holds one algorithm that cuts a chain into stages on devices."""
