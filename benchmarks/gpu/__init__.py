"""All measurements that need a GPU, in one resumable program: python -m benchmarks.gpu --help"""
