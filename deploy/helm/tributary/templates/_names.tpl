{{/* Release and chart name, once when they are the same. */}}
{{- define "tributary.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name }}{{ end -}}
{{- end }}

{{/* What selects a component's pods; takes {root, component}. */}}
{{- define "tributary.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tributary.labels" -}}
{{ include "tributary.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tributary.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- define "tributary.materializerSecret" -}}
{{ .Values.materializer.secretName | default (printf "%s-materializer" (include "tributary.name" .)) }}
{{- end }}

{{- define "tributary.pullerSecret" -}}
{{ .Values.puller.secretName | default (printf "%s-puller" (include "tributary.name" .)) }}
{{- end }}
