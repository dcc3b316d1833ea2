"""The store in a bucket of an object store: S3, Google Cloud Storage, Azure Blob Storage, and servers that speak S3."""
