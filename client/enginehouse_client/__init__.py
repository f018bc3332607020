"""The Python client of an Enginehouse server: tritonclient under typed requests, results and errors."""
