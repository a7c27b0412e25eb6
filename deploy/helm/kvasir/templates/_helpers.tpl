{{- define "kvasir.name" -}}
{{- if contains "kvasir" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvasir" (.Release.Name | trunc 43) }}{{ end }}
{{- end }}

{{- define "kvasir.selector" -}}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvasir.labels" -}}
{{ include "kvasir.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvasir.metadata" -}}
name: {{ include "kvasir.name" . }}
namespace: {{ .Release.Namespace }}
labels: {{- include "kvasir.labels" . | nindent 2 }}
{{- end }}

{{- define "kvasir.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* The server's JSON file: what the chart decides goes over what config says. */}}
{{- define "kvasir.config" -}}
{{- $name := include "kvasir.name" . }}
{{- $own := dict "model" .Values.model "drain_seconds" (printf "%ds" (int .Values.drainSeconds)) }}
{{- if .Values.servedModelName }}{{ $_ := set $own "served_model_name" .Values.servedModelName }}{{ end }}
{{- if gt (int .Values.gpus) 0 }}{{ $_ := set $own "device" "cuda" }}{{ end }}
{{- if .Values.auth.keysSecret }}{{ $_ := set $own "keys" "/secrets/keys/keys.json" }}
{{- else }}{{ $_ := set $own "allow_no_keys" true }}
{{- $_ := set $own "hosts" (concat (list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace)) .Values.hosts) }}
{{- end }}
{{- if .Values.tls.secret }}{{ $_ := set $own "tls_cert" "/secrets/tls/tls.crt" }}{{ $_ := set $own "tls_key" "/secrets/tls/tls.key" }}
{{- if .Values.tls.clientCa }}{{ $_ := set $own "tls_client_ca" "/secrets/tls/ca.crt" }}{{ end }}
{{- end }}
{{- mergeOverwrite (dict "log_format" "json") .Values.config $own | toPrettyJson }}
{{- end }}

{{/* A probe of PATH: kubelet has no certificate to show, so where clients need one the server's own command asks. */}}
{{- define "kvasir.probe" -}}
{{- if and .root.Values.tls.secret .root.Values.tls.clientCa -}}
exec: {command: [kvasir, health, --pid, "1"{{ if eq .path "/health" }}, --live{{ end }}]}
{{- else -}}
httpGet: {path: {{ .path }}, port: http{{ if .root.Values.tls.secret }}, scheme: HTTPS{{ end }}}
{{- end }}
{{- end }}
