# shows: vLLM's development paths: /sleep, /is_sleeping, /wake_up, /reset_prefix_cache, /collective_rpc
# server: --operator-paths
import requests

url = "http://localhost:8000"
assert requests.post(f"{url}/sleep", params={"level": 1}, timeout=60).ok
assert requests.get(f"{url}/is_sleeping", timeout=60).json()["is_sleeping"]
assert requests.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 503
assert requests.post(f"{url}/wake_up", timeout=60).ok
assert requests.post(f"{url}/reset_prefix_cache", timeout=60).ok
print(requests.post(f"{url}/collective_rpc", json={"method": "reload_weights"}, timeout=60).json())
print(requests.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60).json()["choices"])
