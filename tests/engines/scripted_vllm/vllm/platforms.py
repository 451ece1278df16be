class current_platform:  # vLLM's own name
    @staticmethod
    def is_cpu() -> bool:
        return True
