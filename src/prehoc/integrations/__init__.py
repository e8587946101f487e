"""Engines that prehoc enters through their public seams."""
