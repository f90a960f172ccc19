class StructuredOutputsParams:
    def __init__(self, regex):
        self.regex = regex
