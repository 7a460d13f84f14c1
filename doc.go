package grpcretry
