"""The orders of a shop, questions about them, and the reward with its feedback."""

import json

PRICES = {str(order): 10 + order * 37 % 90 for order in range(100, 160)}


def score(task, result):
    """1 for the price as a bare number, 0.5 for the price in a sentence; the words are what a search over prompts reads."""
    answer = result.answer.strip()
    if answer == task["price"]:
        return {"score": 1.0, "feedback": "Right."}
    if task["price"] in answer.replace(".", " ").split():
        return {
            "score": 0.5,
            "feedback": f"The price is right, but the form takes the number alone, not: {answer[:200]}",
        }
    looked_up = [use for use in result.tool_calls if use.name == "look_up"]
    why = "the order was looked up in vain" if looked_up else "nobody had a look: look up the order before the answer"
    return {"score": 0.0, "feedback": f"The price is {task['price']}, and {why}."}


def write(name, orders):
    with open(name, "w") as file:
        for order in orders:
            task = {"question": f"What does order {order} cost?", "order": order, "price": str(PRICES[order])}
            file.write(json.dumps(task) + "\n")


if __name__ == "__main__":
    orders = list(PRICES)
    write("train.jsonl", orders[:30])
    write("val.jsonl", orders[30:50])
    write("heldout.jsonl", orders[50:])
