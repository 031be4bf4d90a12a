// Custom resources against the schemas of their projects: types, required members, enumerations and patterns; members
// that no schema knows are not seen. Reads a JSON array of objects, and writes one of the problems of each.
// The first argument is the folder with @kubernetes-models.

const [models] = process.argv.slice(2);
const FILES = {
  HTTPRoute: "gateway-api/gateway.networking.k8s.io/v1/HTTPRoute.js",
  PodMonitor: "prometheus-operator/monitoring.coreos.com/v1/PodMonitor.js",
  PrometheusRule: "prometheus-operator/monitoring.coreos.com/v1/PrometheusRule.js",
};

let text = "";
for await (const chunk of process.stdin) text += chunk;
const answers = [];
for (const object of JSON.parse(text)) {
  const module = await import(`${models}/${FILES[object.kind]}`);
  try {
    new module[object.kind](object).validate();
    answers.push(null);
  } catch (error) {
    answers.push(error.message);
  }
}
console.log(JSON.stringify(answers));
