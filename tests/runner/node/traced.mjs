// An agent that is instrumented with OpenTelemetry and has nothing of Agent Lightning: the environment says where spans go.
import { trace } from "@opentelemetry/api";
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-proto";
import { BatchSpanProcessor, NodeTracerProvider } from "@opentelemetry/sdk-trace-node";
import { detectResources, envDetector } from "@opentelemetry/resources";

const provider = new NodeTracerProvider({
  resource: detectResources({ detectors: [envDetector] }),
  spanProcessors: [new BatchSpanProcessor(new OTLPTraceExporter())],
});
provider.register();

const tracer = trace.getTracer("agent");
tracer.startActiveSpan("plan", (plan) => {
  tracer.startActiveSpan("execute_tool search", (tool) => {
    tool.setAttribute("gen_ai.tool.name", "search");
    tool.end();
  });
  plan.end();
});
await provider.shutdown();
console.log(1.0);
