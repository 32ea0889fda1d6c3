"""The program of the child process: runs under the Python that has `verifiers`."""
