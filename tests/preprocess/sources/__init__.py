"""Tests of the layouts, each as its owner lays it out."""
