"""What is to be measured when a GPU is at hand, in one resumable program: python -m benchmarks.gpu --help"""
