module example.com/grpcretry/tools/protoc-gen-go

go 1.25.0

tool google.golang.org/protobuf/cmd/protoc-gen-go

require google.golang.org/protobuf v1.36.10 // indirect
