"""Tests whether a bucket is fit for a root, by using it below a prefix of the doctor's own."""
