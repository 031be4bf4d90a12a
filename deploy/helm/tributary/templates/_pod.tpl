{{/* What every pod has: no API token, no service links (they would put variables that begin with TRIBUTARY_ into the
     process), no root. */}}
{{- define "tributary.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "tributary.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The databases' addresses from a Secret; without state-url the state is kept in the source database. */}}
{{- define "tributary.databases" -}}
- name: TRIBUTARY_SOURCE_URL
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: source-url
- name: TRIBUTARY_STATE_URL
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: state-url
      optional: true
{{- end }}

{{- define "tributary.settings" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "tributary.probes" -}}
startupProbe:
  httpGet:
    path: /livez
    port: admin
  periodSeconds: 2
  failureThreshold: 30
livenessProbe:
  httpGet:
    path: /livez
    port: admin
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /readyz
    port: admin
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}

{{/* Over zones and nodes; takes {root, component, overNodes}. */}}
{{- define "tributary.spread" -}}
- topologyKey: topology.kubernetes.io/zone
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "tributary.selector" . | nindent 6 }}
  matchLabelKeys: [pod-template-hash]
- topologyKey: kubernetes.io/hostname
  maxSkew: 1
  whenUnsatisfiable: {{ .overNodes }}
  labelSelector:
    matchLabels:
      {{- include "tributary.selector" . | nindent 6 }}
  matchLabelKeys: [pod-template-hash]
{{- end }}
