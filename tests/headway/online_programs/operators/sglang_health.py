# shows: the health, model and server queries of SGLang's scripts
import requests

url = "http://localhost:30000"
assert requests.get(f"{url}/health_generate", timeout=30).status_code == 200
print(requests.get(f"{url}/model_info", timeout=10).json(), requests.get(f"{url}/get_server_info", timeout=10).json())
assert requests.get(f"{url}/v1/models", timeout=10).json()["data"]
