"""What each page takes for granted, such as a model: run in the page's Python before its first block."""
